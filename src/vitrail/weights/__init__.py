"""Weight files of all supported libraries: safe reading, atomic writing, conversion."""
