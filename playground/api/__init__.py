"""Endpoints for other programs: OpenAI's, Triton's, Prometheus'. They share the page's engine."""
