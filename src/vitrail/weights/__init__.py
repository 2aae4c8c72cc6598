"""Weight files: read safely, whoever made them, and written so that a crash leaves the old one."""
