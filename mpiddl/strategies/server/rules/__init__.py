"""Update rules of parameter servers, one a file."""
