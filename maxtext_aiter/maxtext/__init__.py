"""The plugin for an unmodified MaxText: what its words mean in ours, and where it is hooked."""
