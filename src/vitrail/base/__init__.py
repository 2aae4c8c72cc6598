"""What every room stands on: errors, checks of fields, safe files, progress. No torch."""
