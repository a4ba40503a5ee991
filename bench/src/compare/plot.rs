//! Plots as SVG text, in light and dark. A line is told from another by colour, dash, marker and the name at its
//! end, so that no reader depends on colours.

use std::fmt::Write;

/// How a plot ends that has nothing to show.
pub(super) const EMPTY: &str = "<text x='20' y='60'>not measured</text></svg>";

/// A named line over categories; a category without a number is left out.
pub(super) struct Line {
    pub(super) name: String,
    /// Which colour, dash and marker.
    pub(super) style: usize,
    pub(super) points: Vec<Option<f64>>,
}

/// A named bar of one or two parts.
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) style: usize,
    pub(super) parts: Vec<f64>,
    /// The smallest and the largest of the repetitions, where the bar has one part.
    pub(super) range: Option<(f64, f64)>,
    /// Behind the bar.
    pub(super) note: String,
}

/// Lines over categories of equal distance; the numbers on a logarithmic scale.
pub(super) fn lines(
    title: &str,
    over: &str,
    unit: &str,
    categories: &[String],
    lines: &[Line],
) -> String {
    let numbers = lines
        .iter()
        .flat_map(|line| &line.points)
        .flatten()
        .copied();
    let (low, high) = numbers
        .filter(|number| *number > 0.0)
        .fold((f64::MAX, 0.0_f64), |(low, high), one| {
            (low.min(one), high.max(one))
        });
    let mut svg = begin(title, HEIGHT);
    if high == 0.0 {
        return svg + EMPTY;
    }
    let (mut low, mut high) = (low * 0.85, high * 1.15);
    // One number on the scale says nothing of the others.
    while ticks(low, high).len() < 2 {
        (low, high) = (low * 0.9, high * 1.1);
    }
    let x = |at: usize| LEFT + (RIGHT - LEFT) * (at as f64 + 0.5) / categories.len() as f64;
    let y = |number: f64| BOTTOM - (BOTTOM - TOP) * (number / low).ln() / (high / low).ln();
    for tick in ticks(low, high) {
        let at = y(tick);
        let _written = write!(
            svg,
            "<path class='grid' d='M{LEFT} {at:.1}H{RIGHT}'/><text class='small' x='{}' y='{:.1}' text-anchor='end'>{}</text>",
            LEFT - 8.0,
            at + 4.0,
            short(tick)
        );
    }
    for (at, category) in categories.iter().enumerate() {
        let _written = write!(
            svg,
            "<text class='small' x='{:.1}' y='{}' text-anchor='middle'>{}</text>",
            x(at),
            BOTTOM + 18.0,
            escaped(category)
        );
    }
    let _written = write!(
        svg,
        "<text class='small' x='{}' y='{}' text-anchor='middle'>{}</text><text class='small' x='{LEFT}' y='{}' text-anchor='middle'>{}</text>",
        f64::midpoint(LEFT, RIGHT),
        BOTTOM + 38.0,
        escaped(over),
        TOP - 10.0,
        escaped(unit)
    );
    let mut labels = Vec::new();
    for line in lines {
        let points = line.points.iter().enumerate().filter_map(|(at, point)| {
            point
                .filter(|number| *number > 0.0)
                .map(|number| (x(at), y(number)))
        });
        let points: Vec<(f64, f64)> = points.collect();
        let Some(last) = points.last() else { continue };
        labels.push((last.1, last.0, line));
        let path: Vec<String> = points
            .iter()
            .map(|(x, y)| format!("{x:.1} {y:.1}"))
            .collect();
        let dash = DASHES[line.style % DASHES.len()];
        let width = if line.style == 0 { 3.0 } else { 1.8 };
        let style = line.style % STYLES;
        let _written = write!(
            svg,
            "<path class='line s{style}' style='stroke-width:{width};stroke-dasharray:{dash}' d='M{}'/>",
            path.join("L")
        );
        for (x, y) in points {
            svg += &marker(line.style, x, y);
        }
    }
    // Names that would overlap move down, then all of them up if the last one left the plot.
    labels.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut places: Vec<f64> = Vec::new();
    for (wanted, ..) in &labels {
        let least = places.last().map_or(TOP, |above| above + LABEL);
        places.push(wanted.max(least));
    }
    for (behind, place) in places.iter_mut().rev().enumerate() {
        *place = place.min(BOTTOM - behind as f64 * LABEL);
    }
    for ((wanted, end, line), place) in labels.iter().zip(places) {
        let style = line.style % STYLES;
        let _written = write!(
            svg,
            "<path class='lead' d='M{:.1} {wanted:.1}L{:.1} {place:.1}'/><text class='t{style}' x='{}' y='{:.1}'>{}</text>",
            end + 7.0,
            RIGHT + 10.0,
            RIGHT + 14.0,
            place + 4.0,
            escaped(&line.name)
        );
    }
    svg + "</svg>"
}

/// Horizontal bars from zero.
pub(super) fn bars(title: &str, unit: &str, parts: &[&str], bars: &[Bar]) -> String {
    let height = 84.0 + 30.0 * bars.len() as f64;
    let mut svg = begin(title, height);
    let most = bars.iter().map(|bar| {
        bar.range
            .map_or(0.0, |range| range.1)
            .max(bar.parts.iter().sum())
    });
    let most = most.fold(0.0, f64::max);
    if most <= 0.0 {
        return svg + EMPTY;
    }
    let scale = (BARS_END - BARS) / most;
    let _written = write!(
        svg,
        "<text class='small' x='{BARS}' y='52'>{}</text>",
        escaped(&legend(unit, parts))
    );
    for (at, bar) in bars.iter().enumerate() {
        let (top, style) = (62.0 + 30.0 * at as f64, bar.style % STYLES);
        let _written = write!(
            svg,
            "<text x='{}' y='{:.1}' text-anchor='end'>{}</text>",
            BARS - 10.0,
            top + 15.0,
            escaped(&bar.name)
        );
        let mut from = BARS;
        for (part, number) in bar.parts.iter().enumerate() {
            let (width, solid) = (number * scale, if part == 0 { "1" } else { "0.45" });
            let _written = write!(
                svg,
                "<rect class='b{style}' fill-opacity='{solid}' x='{from:.1}' y='{top:.1}' width='{width:.1}' height='20'/>"
            );
            from += width;
        }
        let mut end = from;
        if let Some((low, high)) = bar.range {
            let (low, high) = (BARS + low * scale, BARS + high * scale);
            let middle = top + 10.0;
            let _written = write!(
                svg,
                "<path class='range' d='M{low:.1} {middle:.1}H{high:.1}M{low:.1} {:.1}v8M{high:.1} {:.1}v8'/>",
                middle - 4.0,
                middle - 4.0
            );
            end = end.max(high);
        }
        let _written = write!(
            svg,
            "<text class='small' x='{:.1}' y='{:.1}'>{}</text>",
            end + 8.0,
            top + 15.0,
            escaped(&bar.note)
        );
    }
    svg + "</svg>"
}

fn legend(unit: &str, parts: &[&str]) -> String {
    match parts {
        [first, second] => format!("{unit}; strong: {first}, faint: {second}"),
        _ => unit.to_owned(),
    }
}

fn begin(title: &str, height: f64) -> String {
    let label = escaped(title);
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' aria-label='{label}'><style>{STYLE}</style><rect class='paper' width='{WIDTH}' height='{height}' rx='8'/><text class='title' x='20' y='28'>{label}</text>"
    )
}

/// 1, 2 and 5 of every power of ten; powers alone where those are many.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let steps: &[f64] = if high / low > 3_000.0 {
        &[1.0]
    } else {
        &[1.0, 2.0, 5.0]
    };
    let all = (-3..=9).flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
    all.filter(|tick| (low..=high).contains(tick)).collect()
}

fn marker(style: usize, x: f64, y: f64) -> String {
    let class = style % STYLES;
    match style % 4 {
        0 => format!("<circle class='b{class}' cx='{x:.1}' cy='{y:.1}' r='4.5'/>"),
        1 => format!(
            "<rect class='b{class}' x='{:.1}' y='{:.1}' width='8' height='8'/>",
            x - 4.0,
            y - 4.0
        ),
        2 => format!(
            "<path class='b{class}' d='M{x:.1} {:.1}l5 9h-10z'/>",
            y - 5.5
        ),
        _ => format!(
            "<path class='b{class}' d='M{x:.1} {:.1}l5 5l-5 5l-5-5z'/>",
            y - 5.0
        ),
    }
}

/// A number as people write it.
pub(super) fn short(number: f64) -> String {
    match number.abs() {
        size if size >= 1e6 => format!("{}M", trimmed(number / 1e6)),
        size if size >= 1e4 => format!("{}k", trimmed(number / 1e3)),
        size if size >= 100.0 => format!("{number:.0}"),
        _ => trimmed(number),
    }
}

fn trimmed(number: f64) -> String {
    let text = match number.abs() {
        size if size >= 100.0 => format!("{number:.0}"),
        size if size >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    };
    match text.split_once('.') {
        Some((whole, part)) if part.trim_end_matches('0').is_empty() => whole.to_owned(),
        Some(_) => text.trim_end_matches('0').to_owned(),
        None => text,
    }
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&#39;")
        .replace('"', "&quot;")
}

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 66.0;
const BOTTOM: f64 = 326.0;
/// Where bars begin, and where the longest ends: names stand before, notes behind.
const BARS: f64 = 190.0;
const BARS_END: f64 = 540.0;
/// Between two names.
const LABEL: f64 = 19.0;
const STYLES: usize = 10;
const DASHES: [&str; 10] = [
    "none", "8 4", "2 3", "10 3 2 3", "5 5", "none", "8 4", "2 3", "10 3 2 3", "5 5",
];
/// After Okabe and Ito, whose colours differ for colour-blind readers, too; lighter on dark paper.
const STYLE: &str = "text{font:15px system-ui,sans-serif;fill:#1c2024}.title{font-weight:600;font-size:17px}.small{font-size:14px;fill:#545b64}\
.paper{fill:#fff}.grid{stroke:#d9dde2;fill:none}.line{fill:none;stroke-linejoin:round}.lead{stroke:#9aa3ad;stroke-width:.7;fill:none}.range{stroke:#1c2024;fill:none;stroke-width:1.5}\
.s0{stroke:#0072b2}.b0,.t0{fill:#0072b2}.t0{font-weight:700}.s1{stroke:#d55e00}.b1{fill:#d55e00}.s2{stroke:#009e73}.b2{fill:#009e73}.s3{stroke:#b5588f}.b3{fill:#b5588f}\
.s4{stroke:#c98500}.b4{fill:#c98500}.s5{stroke:#3a9fd8}.b5{fill:#3a9fd8}.s6{stroke:#555}.b6{fill:#555}.s7{stroke:#7d6ac2}.b7{fill:#7d6ac2}.s8{stroke:#857400}.b8{fill:#857400}.s9{stroke:#8c4a1f}.b9{fill:#8c4a1f}\
@media(prefers-color-scheme:dark){text{fill:#e8eaed}.small{fill:#a9b1ba}.paper{fill:#16191d}.grid{stroke:#333a42}.range{stroke:#e8eaed}\
.s0{stroke:#56b4e9}.b0,.t0{fill:#56b4e9}.s1{stroke:#ff8a4c}.b1{fill:#ff8a4c}.s2{stroke:#35d0a5}.b2{fill:#35d0a5}.s3{stroke:#e9a5cb}.b3{fill:#e9a5cb}\
.s4{stroke:#f5c04e}.b4{fill:#f5c04e}.s5{stroke:#a8dcff}.b5{fill:#a8dcff}.s6{stroke:#bbb}.b6{fill:#bbb}.s7{stroke:#b9a9f5}.b7{fill:#b9a9f5}.s8{stroke:#f0e442}.b8{fill:#f0e442}.s9{stroke:#d3a27a}.b9{fill:#d3a27a}}";

#[cfg(test)]
mod tests {
    use super::{Line, escaped, lines, short, ticks};

    #[test]
    fn ticks_lie_inside_and_numbers_are_short() {
        assert_eq!(ticks(80.0, 1_200.0), [100.0, 200.0, 500.0, 1000.0]);
        let shown = [0.5, 94.0, 246.4, 65_000.0, 1_000_000.0].map(short);
        assert_eq!(shown, ["0.5", "94", "246", "65k", "1M"]);
    }

    #[test]
    fn a_plot_leaves_out_what_was_not_measured_and_escapes_names() {
        let line = Line {
            name: "<dlock>".to_owned(),
            style: 0,
            points: vec![Some(10.0), None, Some(1000.0)],
        };
        let categories = ["1", "16", "128"].map(str::to_owned);
        let svg = lines("a & b", "tasks", "µs", &categories, &[line]);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(
            svg.contains("&lt;dlock&gt;") && svg.contains("a &amp; b"),
            "{svg}"
        );
        assert_eq!(escaped("'"), "&#39;");
    }
}
