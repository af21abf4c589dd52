"""The whole split system as its own processes, asked through the official client."""
