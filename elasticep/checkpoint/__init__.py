"""Expert weights out of Hugging Face checkpoints, without torch and without reading the rest.

checkpoint = open_checkpoint("/models/Qwen3-30B-A3B")
spec = checkpoint.weight_spec()             # of one expert, gate and up fused
units = checkpoint.units(spec)
data = units.read(layer=3, expert=17)       # plain bytes, in the order of the spec
"""

from elasticep.checkpoint.names import ExpertTensor, expert_tensors
from elasticep.checkpoint.opened import Checkpoint, open_checkpoint
from elasticep.checkpoint.units import Units

__all__ = ["Checkpoint", "ExpertTensor", "Units", "expert_tensors", "open_checkpoint"]
