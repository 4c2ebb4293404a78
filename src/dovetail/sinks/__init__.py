"""Where events of runs are exported to, beside the store."""
