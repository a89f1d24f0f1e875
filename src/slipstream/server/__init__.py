"""The HTTP server: OpenAI's interface over a worker that decodes all requests together. Needs the extra `serve`."""
