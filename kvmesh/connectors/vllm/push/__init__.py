"""Pages of a prompt that one engine pushes to another: windows of those who receive, holds of those who send."""
