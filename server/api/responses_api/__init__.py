"""OpenAI's newer protocol: `/v1/responses`."""
