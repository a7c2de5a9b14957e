"""What a run will need and how fast it will be, before anything is started: arithmetic on shapes and measured rates."""
