"""The commands that have commands below them: names, arguments and help texts only."""
