"""The text engine: tokens and image embeddings in, tokens out."""
