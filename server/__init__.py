"""The launcher, one engine per rank, the OpenAI front end, and the command line."""
