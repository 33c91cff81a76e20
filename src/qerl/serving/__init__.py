"""OpenAI's HTTP interface over the rollout engine: completions and chat, streamed or whole."""
