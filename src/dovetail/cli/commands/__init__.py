"""What each command does, one file each; loaded when it is called."""
