"""The course: the claims of the lecture notes as labs, exercises that mark themselves, errata, the walk."""
