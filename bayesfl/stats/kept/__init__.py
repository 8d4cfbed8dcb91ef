"""What sites keep of the questions that they were asked."""
