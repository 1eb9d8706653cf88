"""The hub in the coordinator's process through which all control messages go, and its wire protocol."""
