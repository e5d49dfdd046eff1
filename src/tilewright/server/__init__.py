"""HTTP server with OpenAI's and Anthropic's APIs."""
