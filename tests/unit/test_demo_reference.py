"""What the demo's answers are compared with: no bit hangs on the batch."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from elasticep.demo.journal import Assignment  # noqa: E402
from elasticep.demo.model import build_model, prepare, save_model, skew_router  # noqa: E402
from elasticep.demo.reference import rowwise_model, run_reference  # noqa: E402
from elasticep.demo.settings import ModelSizes  # noqa: E402
from elasticep.errors import ConfigError  # noqa: E402

SIZES = ModelSizes(layers=2, hidden=64, experts=8, topk=2)
LENGTH = 24
REQUESTS = [Assignment(n, tuple(range(60 + n, 70 + n)), (), 14 - n) for n in range(5)]


def numbered(chosen: list[int]) -> list[Assignment]:
    return [dataclasses.replace(REQUESTS[n], request=place) for place, n in enumerate(chosen)]


@pytest.fixture(scope="module")
def model() -> Any:
    prepare()
    made = build_model(SIZES, 5)
    skew_router(made, SIZES)
    return made


def test_a_request_has_the_same_logits_alone_and_in_any_batch(model: Any) -> None:
    together = run_reference(model, SIZES, REQUESTS, LENGTH)
    assert [len(sums) for sums in together.sums] == [14, 13, 12, 11, 10]
    for some in ([0], [3], [1, 4], [4, 2, 0]):
        alone = run_reference(model, SIZES, numbered(some), LENGTH)
        assert alone.tokens == [together.tokens[n] for n in some]
        assert alone.sums == [together.sums[n] for n in some]


def test_a_model_that_does_not_fit_on_the_disk_is_refused_by_name(
    model: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=rf"{tmp_path} \(.*No space left.*TMPDIR"):
        save_model(model, tmp_path)


def test_it_is_the_model_whose_blocks_are_its_own(model: Any) -> None:
    """The library's blocks give the same up to rounding, and the model is left as it was."""
    before = copy.deepcopy(model.state_dict())
    tokens = torch.arange(48).view(4, 12) * 5
    with torch.inference_mode():
        own = model(input_ids=tokens).logits
        rowwise = rowwise_model(model)(input_ids=tokens).logits
    assert not torch.equal(own, torch.zeros_like(own))
    torch.testing.assert_close(rowwise, own, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
