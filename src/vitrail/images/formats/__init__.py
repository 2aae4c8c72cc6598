"""Where images come from: folders, tables, arrays, packed files, tar shards, Parquet."""
