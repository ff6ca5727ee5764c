//! Draws the scalars in `scalars.json` files as an SVG: one chart per scalar, over iterations, by
//! `plotters`.
//!
//! All charts have the same x axis, and one curve per run. [`curves`](super::curves) reads the
//! files.

use std::error::Error as StdError;
use std::ops::Range;
use std::path::PathBuf;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::curves::{Curve, Run};
use crate::{Error, Result};

/// Width and height of a chart with its axes, in pixels.
const CHART: (u32, u32) = (560, 300);
/// Number of charts side by side.
const COLUMNS: usize = 2;
/// Height of a row of the legend.
const ROW: u32 = 20;
/// Maximum number of points of a curve, limited by the resolution.
const MAX_POINTS: usize = 1000;
/// Colors of the curves, those of Matplotlib.
const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
];
/// Scalars that are drawn only on request.
const COUNTERS: [&str; 5] = ["step", "iter", "epoch", "time", "data_time"];

/// Result of drawing with `plotters`.
type Drawn<T = ()> = Result<T, Box<dyn StdError>>;

/// Draws the scalars of runs that `keys` name, or all except counters and times if it is empty. A
/// path is a `scalars.json`, or a work directory, in which a resumed run is one curve. Python's
/// `NaN` and `Infinity` are accepted, and leave a gap as `null` does; an incomplete last line is
/// ignored. All values, including those of validations, are at iterations.
///
/// # Errors
///
/// [`Error::Io`] for a file that cannot be read; [`Error::Data`] with the line that is not a JSON
/// object, for an unknown key, or if there is nothing to draw.
pub fn plot(paths: &[PathBuf], keys: &[String]) -> Result<String> {
    let runs = paths.iter().map(|path| Run::read(path)).collect::<Result<Vec<_>>>()?;
    draw_runs(&runs, keys)
}

fn draw_runs(runs: &[Run], keys: &[String]) -> Result<String> {
    let mut names: Vec<_> = runs.iter().flat_map(|run| run.curves.keys()).collect();
    names.sort_unstable();
    names.dedup();
    if let Some(key) = keys.iter().find(|key| !names.contains(key)) {
        let names: Vec<_> = names.iter().map(|name| name.as_str()).collect();
        let text = format!("unknown key `{key}`; known: {}", names.join(", "));
        return Err(Error::data(text));
    }
    names.retain(|name| match keys {
        [] => !COUNTERS.contains(&name.as_str()),
        keys => keys.contains(name),
    });
    if names.is_empty() {
        return Err(Error::data("there is nothing to draw"));
    }
    let mut svg = String::new();
    draw(runs, &names, &mut svg).map_err(|e| Error::data(format!("cannot draw: {e}")))?;
    Ok(svg)
}

fn draw(runs: &[Run], names: &[&String], svg: &mut String) -> Drawn {
    let (columns, rows) = (names.len().min(COLUMNS), names.len().div_ceil(COLUMNS));
    let legend = if runs.len() > 1 { ROW * (runs.len() as u32 + 1) } else { 0 };
    let size = (CHART.0 * columns as u32, CHART.1 * rows as u32 + legend);
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let (top, charts) = root.split_vertically(legend);
    if legend > 0 {
        draw_legend(runs, &top)?;
    }
    let iters = runs.iter().flat_map(|run| names.iter().filter_map(|name| run.curves.get(*name)));
    let iters = iters.flatten().map(|point| point.0);
    let (first, last) = (iters.clone().min().unwrap_or(0), iters.max().unwrap_or(0));
    let x = if first < last { first..last } else { first - 1..last + 1 };
    let unit = if runs.iter().any(|run| run.has_iters) { "iteration" } else { "step" };
    for (area, name) in charts.split_evenly((rows, columns)).iter().zip(names) {
        let curves: Vec<_> = runs.iter().map(|run| run.curves.get(*name)).collect();
        draw_chart(area, (name, unit), x.clone(), &curves)?;
    }
    root.present()?;
    drop((top, charts, root));
    Ok(())
}

/// Draws one row per run with its color and its name.
fn draw_legend(runs: &[Run], area: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
    for (row, (run, color)) in runs.iter().zip(COLORS.iter().cycle()).enumerate() {
        let y = (ROW * (row as u32 + 1)) as i32;
        area.draw(&PathElement::new([(16, y), (40, y)], color.stroke_width(2)))?;
        area.draw(&Text::new(printable(&run.name), (48, y - 7), ("sans-serif", 14)))?;
    }
    Ok(())
}

fn draw_chart(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    (name, unit): (&str, &str),
    x: Range<i64>,
    curves: &[Option<&Curve>],
) -> Drawn {
    let values = curves.iter().copied().flatten().flatten().map(|point| f64::from(point.1));
    let y = value_range(values);
    // `plotters` places ticks best for numbers around 1; labels are scaled back.
    let scale = 10_f64.powf((y.end - y.start).log10().floor());
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(24)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d(x, y.start / scale..y.end / scale)?;
    chart
        .configure_mesh()
        .x_desc(unit)
        .y_desc(printable(name))
        .x_labels(7)
        .y_labels(6)
        .y_label_formatter(&|value| label(value * scale))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(230, 230, 230))
        .axis_style(RGBColor(150, 150, 150))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let Some(curve) = curve else { continue };
        let every = curve.len().div_ceil(MAX_POINTS);
        let kept = curve.iter().enumerate();
        let kept = kept.filter(|(at, _)| at % every == 0 || at + 1 == curve.len());
        let points: Vec<_> = kept.map(|(_, p)| (p.0, f64::from(p.1) / scale)).collect();
        // A line is interrupted at non-finite values, and a single point is drawn as a dot.
        let lines = points.split(|point| !point.1.is_finite());
        for line in lines.filter(|line| !line.is_empty()) {
            if let [one] = line {
                chart.draw_series([Circle::new(*one, 2, color.filled())])?;
            } else {
                let line = LineSeries::new(line.iter().copied(), color.stroke_width(2));
                chart.draw_series(line)?;
            }
        }
    }
    Ok(())
}

/// Returns a range from below the smallest finite value to above the greatest. Values that differ
/// only by rounding are centered in a range of their own magnitude.
fn value_range(values: impl Iterator<Item = f64>) -> Range<f64> {
    let finite = values.filter(|value| value.is_finite());
    let range = finite.fold(None, |range: Option<(f64, f64)>, value| {
        let (low, high) = range.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    });
    let (low, high) = range.unwrap_or((0.0, 0.0));
    let size = low.abs().max(high.abs());
    if high - low > 1e-6 * size {
        let margin = (high - low) * 0.05;
        return low - margin..high + margin;
    }
    let margin = if size > 0.0 { size / 2.0 } else { 1.0 };
    low - margin..high + margin
}

/// Formats a tick's number, without digits due to rounding.
fn label(value: f64) -> String {
    let value: f64 = format!("{value:.6e}").parse().unwrap_or(value);
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (1e-3..1e5).contains(&size) => value.to_string(),
        _ => format!("{value:e}"),
    }
}

/// Removes characters that XML does not allow.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(text: &str) -> Run {
        let mut run = Run::default();
        run.append(text, i64::MIN).unwrap();
        run
    }

    #[test]
    fn scalars_of_mmengine_are_drawn() {
        let recorded = include_str!("../../tests/vectors/log_epoch.txt");
        let text: String =
            recorded.lines().filter(|l| l.starts_with('{')).map(|l| l.to_owned() + "\n").collect();
        let svg = draw_runs(&[run(&text)], &[]).unwrap();
        for name in ["lr", "loss", "grad_norm", "digits/accuracy", "iteration"] {
            assert!(svg.contains(&format!(">\n{name}\n</text>")), "{name}: {svg}");
        }
        assert!(!svg.contains("\ntime\n"));
        let said = draw_runs(&[run("{\"step\": 1, \"epoch\": 1}")], &[]).unwrap_err().to_string();
        assert_eq!(said, "there is nothing to draw");
    }

    #[test]
    fn line_is_interrupted_at_non_finite_values() {
        let text = "{\"step\": 1, \"a\": 1}\n{\"step\": 2, \"a\": NaN}\n{\"step\": 3, \"a\": 3}\n";
        let svg = draw_runs(&[run(text)], &[]).unwrap();
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
        // A curve without any finite value.
        let svg = draw_runs(&[run("{\"step\": 1, \"a\": null}\n")], &[]).unwrap();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn labels_are_short() {
        for (value, want) in
            [(0.0, "0"), (0.30000000000000004, "0.3"), (-2e-5, "-2e-5"), (1500.0, "1500")]
        {
            assert_eq!(label(value), want);
        }
    }

    proptest! {
        #[test]
        fn any_numbers_and_names_are_drawn_inside_the_chart(
            name in ".{1,5}",
            values in prop::collection::vec(prop::num::f64::ANY, 1..40),
            far in prop::num::f32::ANY,
        ) {
            prop_assume!(!COUNTERS.contains(&name.as_str()));
            let values = values.into_iter().chain([f64::from(far)]);
            let lines = values.enumerate().map(|(i, v)| {
                serde_json::json!({ "step": i, (name.as_str()): v }).to_string() + "\n"
            });
            let svg = draw_runs(&[run(&lines.collect::<String>())], &[]).unwrap();
            for points in svg.split("points=\"").skip(1) {
                let points = points.split('"').next().unwrap();
                for number in points.split([',', ' ']).filter(|n| !n.is_empty()) {
                    let number: u32 = number.parse().unwrap();
                    prop_assert!(number <= CHART.0, "{points}");
                }
            }
        }
    }
}
