"""The hub in the coordinator's process, which forwards all control messages, and its wire protocol."""
