"""`echelon tune`: measures every operation on every road, and writes the table that routes are read from."""
