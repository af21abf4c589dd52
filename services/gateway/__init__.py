"""The gateway: an OpenAI-style API in front of vision encoders and text engines. Never imports torch."""
