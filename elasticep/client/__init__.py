"""What an engine imports: attach to a rank, open steps, exchange rows.

`elasticep.client.exchange` needs torch; the rest of this package does not, and torch is imported
only when a session is asked for an exchange.
"""

from elasticep.client.attach import attach
from elasticep.client.session import Session
from elasticep.client.step import Step
from elasticep.client.view import View

__all__ = ["Session", "Step", "View", "attach"]
