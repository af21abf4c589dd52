"""Which checkpoints the engine takes: a family maps a Hugging Face config to `ModelConfig` and tensor names to ours."""
