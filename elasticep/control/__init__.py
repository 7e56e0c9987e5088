"""What decides: placement, membership, rebalancing, and the controller that runs them."""
