"""Operations under way, and the thread that advances them."""
