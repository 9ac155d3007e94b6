"""From a model's raw text to reasoning, content and tool calls, piece by piece as it comes.

`reader` takes text in pieces of any size; `sink` collects what was found. Each format is one
generator over a reader that reads top to bottom like the format itself, so that nothing depends on
how the text was cut. `registry` knows all formats by name and recognises them in chat templates.
"""
