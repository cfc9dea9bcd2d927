"""The composition root: the only place that starts services."""
