"""JAX ops: what users call. They know nothing of MaxText."""
