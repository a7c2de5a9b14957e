"""The openai dialect: generation for any OpenAI client, by vLLM's own serving classes. It carries no weights."""
