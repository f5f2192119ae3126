"""The ``vllm-yoco`` command: ``cli`` dispatches, every other module is one subcommand."""
