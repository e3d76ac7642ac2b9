"""Saying where a long command is, while it runs."""

import io

from kvtiers.cli.progress import show_progress


def test_where_it_is_is_a_plain_line_every_few_seconds_and_none_for_a_short_run():
    now, out, asked = [0.0], io.StringIO(), []

    def text():
        asked.append(now[0])
        return f"{now[0]:g} s"

    with show_progress(out, lambda: now[0]) as report:
        for now[0] in (1.0, 4.9, 5.0, 6.0, 9.9, 10.5):
            report(text)
    assert out.getvalue() == "5 s\n10.5 s\n"
    assert asked == [5.0, 10.5]


def test_the_last_line_says_how_it_ended_where_there_were_others():
    now, out = [0.0], io.StringIO()
    with show_progress(out, lambda: now[0]) as report:
        for now[0], text in ((5.0, "213/400"), (6.0, "380/400"), (7.0, "400/400")):
            report(lambda text=text: text)
    assert out.getvalue() == "213/400\n400/400\n"


def test_on_a_terminal_it_is_a_line_that_changes():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now, out = [0.0], Terminal()
    with show_progress(out, lambda: now[0]) as report:
        now[0] = 1.0
        report(lambda: "12 values [bold]of[/] 3MiB")
    assert "12 values [bold]of[/] 3MiB" in out.getvalue()
