"""Task library: each task is a pure per-tile function, equivalent to plain jnp code."""
