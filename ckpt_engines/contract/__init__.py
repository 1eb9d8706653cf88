"""The engine contract: engines, their two halves, and the optional protocols for storing and viewing."""
