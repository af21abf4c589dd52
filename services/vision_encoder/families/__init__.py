"""Model families, one file each: what an architecture adds to a vision tower, and how its rows stand in a prompt."""
