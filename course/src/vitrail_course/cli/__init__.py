"""Commands of the course, which `vitrail` finds by their entry points."""
