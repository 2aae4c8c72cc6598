"""Models in other forms: so far, a page that computes one in a browser."""
