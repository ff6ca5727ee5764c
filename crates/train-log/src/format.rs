//! Numbers and times in log lines, as Python formats them.

use std::time::Duration;

/// Formats as Python's `{:.4e}`: `4.5217e-02`.
#[must_use]
pub fn scientific(value: f64) -> String {
    let text = format!("{value:.4e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, size) = match exponent.strip_prefix('-') {
                Some(size) => ('-', size),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{size:0>2}")
        }
        None => text,
    }
}

/// Formats as Python's `timedelta`: `1 day, 2:03:04`, `0:00:07`.
#[must_use]
pub fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    match days {
        0 => clock,
        1 => format!("1 day, {clock}"),
        _ => format!("{days} days, {clock}"),
    }
}

/// Draws `[====    ]`, 24 characters long: `done` of `len`.
#[must_use]
pub fn bar(done: usize, len: usize) -> String {
    const WIDTH: usize = 24;
    let full = (WIDTH * done / len.max(1)).min(WIDTH);
    format!("[{}{}]", "=".repeat(full), " ".repeat(WIDTH - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_as_in_python() {
        assert_eq!(scientific(0.045_217_391_304_347_83), "4.5217e-02");
        assert_eq!(scientific(0.1), "1.0000e-01");
        assert_eq!(scientific(12.5), "1.2500e+01");
        assert_eq!(scientific(f64::NAN), "NaN");
        assert_eq!(clock(Duration::from_secs(7)), "0:00:07");
        assert_eq!(clock(Duration::from_secs(93_784)), "1 day, 2:03:04");
    }
}
