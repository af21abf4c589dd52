"""One decoder network; families are mappings from Hugging Face configs and weight names to it."""
