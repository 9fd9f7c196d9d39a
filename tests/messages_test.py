from messages import first_ten


def test_ten_items_at_most():
    items = [str(i) for i in range(12)]
    assert first_ten(items[:2]) == '0, 1'
    assert first_ten(items[:10], '; ') == '0; 1; 2; 3; 4; 5; 6; 7; 8; 9'
    assert first_ten(items) == '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more'
