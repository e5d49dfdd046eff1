"""HTTP: the engine behind the routes that OpenAI's clients call."""
