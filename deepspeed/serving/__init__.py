"""OpenAI-compatible HTTP server around the inference engine."""
