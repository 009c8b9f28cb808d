"""peers act: transports, nodes, the trainer, and the command line."""
