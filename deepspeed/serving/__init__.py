"""Answers over HTTP: an OpenAI-compatible server around the inference engine."""
