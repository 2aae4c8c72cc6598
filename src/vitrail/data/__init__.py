"""Images and where they come from."""
