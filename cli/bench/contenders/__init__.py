"""What ``weightlane bench`` measures against each other."""
