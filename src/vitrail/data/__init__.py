"""Pictures and where they come from."""
