"""The vision encoder: images in, embeddings into the cache."""
