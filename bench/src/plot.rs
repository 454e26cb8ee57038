//! Plots as SVG, legible on light and on dark backgrounds.

use std::fmt::Write;

use crate::report::Role;

const WIDTH: f64 = 860.0;
/// The colours follow the reader's system, since a page cannot pass its theme to an image.
const STYLE: &str = "
    text { font: 13px system-ui, sans-serif; fill: #1f2328 }
    .title { font-size: 15px; font-weight: 600 } .small { font-size: 12px; fill: #59636e }
    .grid { stroke: #d1d9e0 } .axis { stroke: #59636e }
    .floor { fill: #8c959f } .ours { fill: #0969da } .peer { fill: #d4772c }
    .line { fill: none; stroke-width: 2.5 } .whisker { stroke: #1f2328; stroke-width: 1.5 }
    .line.floor { stroke: #8c959f } .line.ours { stroke: #0969da } .line.peer { stroke: #d4772c }
    @media (prefers-color-scheme: dark) {
        text { fill: #f0f6fc } .small { fill: #9198a1 } .grid { stroke: #3d444d }
        .axis { stroke: #9198a1 } .whisker { stroke: #f0f6fc }
        .floor { fill: #9198a1 } .ours { fill: #4493f8 } .peer { fill: #e89a5d }
        .line.floor { stroke: #9198a1 } .line.ours { stroke: #4493f8 } .line.peer { stroke: #e89a5d }
        .line.floor, .line.ours, .line.peer { fill: none }
    }
    .line.floor, .line.ours, .line.peer { fill: none }
";

pub struct Bar {
    pub label: String,
    pub role: Role,
    pub value: f64,
    /// The end of the whisker.
    pub up_to: Option<f64>,
}

pub struct Line {
    pub label: String,
    pub role: Role,
    pub points: Vec<(f64, f64)>,
}

/// A logarithmic axis whose ends are powers of ten.
struct Axis {
    from: f64,
    to: f64,
    /// The coordinates of the two ends.
    at: [f64; 2],
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, at: [f64; 2]) -> Self {
        let values: Vec<_> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
        let from = values.iter().copied().fold(f64::INFINITY, f64::min);
        let to = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if values.is_empty() {
            return Self { from: 0.0, to: 1.0, at };
        }
        // Without this, a bar at the minimum would have no length.
        let from = (from - 0.1).floor();
        Self { from, to: to.ceil().max(from + 1.0), at }
    }

    fn place(&self, value: f64) -> f64 {
        let part = (value.max(1e-12).log10() - self.from) / (self.to - self.from);
        self.at[0] + part.clamp(0.0, 1.0) * (self.at[1] - self.at[0])
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.from as i32..=self.to as i32).map(|power| 10_f64.powi(power))
    }

    /// Like [`Self::over`], but no longer than necessary.
    fn around(values: impl Iterator<Item = f64>, at: [f64; 2]) -> Self {
        let values: Vec<_> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
        let (from, to) = values
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(from, to), it| (it.min(from), it.max(to)));
        if values.is_empty() {
            return Self { from: 0.0, to: 1.0, at };
        }
        Self { from: from - 0.1, to: to + 0.1, at }
    }

    /// The multiples of 1, 2 and 5 in each power of ten, as far as they are on the axis.
    fn fine_ticks(&self) -> impl Iterator<Item = f64> {
        let powers = self.from.floor() as i32..=self.to.floor() as i32;
        let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|it| it * 10_f64.powi(power)));
        all.filter(|tick| (self.from..=self.to).contains(&tick.log10()))
    }
}

/// Horizontal bars in groups, on one logarithmic axis.
pub fn bars(title: &str, unit: &str, groups: &[(&str, Vec<Bar>)]) -> String {
    const LEFT: f64 = 330.0;
    let all = || groups.iter().flat_map(|(_, bars)| bars);
    let values = all().flat_map(|bar| [Some(bar.value), bar.up_to]).flatten();
    let axis = Axis::over(values, [LEFT, WIDTH - 90.0]);
    let mut body = String::new();
    let mut y = 66.0;
    let top = y - 12.0;
    for (name, bars) in groups {
        y += 14.0;
        text(&mut body, [LEFT - 8.0, y], "end", "title", name);
        y += 10.0;
        for bar in bars {
            let (from, to) = (axis.at[0], axis.place(bar.value));
            let class = class(bar.role);
            text(&mut body, [LEFT - 8.0, y + 12.0], "end", "", &bar.label);
            let width = to - from;
            writeln!(
                body,
                r#"<rect class="{class}" x="{from:.1}" y="{y:.1}" width="{width:.1}" height="15" rx="2"/>"#
            )
            .expect("a string");
            let mut end = to;
            if let Some(up_to) = bar.up_to {
                end = axis.place(up_to).max(to);
                let middle = y + 7.5;
                line(&mut body, "whisker", [to, middle], [end, middle]);
                line(&mut body, "whisker", [end, middle - 4.0], [end, middle + 4.0]);
            }
            text(&mut body, [end + 6.0, y + 12.0], "start", "small", &number(bar.value));
            y += 21.0;
        }
        y += 6.0;
    }
    let mut grid = String::new();
    for tick in axis.ticks() {
        let x = axis.place(tick);
        line(&mut grid, "grid", [x, top], [x, y]);
        text(&mut grid, [x, y + 18.0], "middle", "small", &on_axis(tick));
    }
    text(&mut grid, [LEFT.midpoint(WIDTH - 90.0), y + 38.0], "middle", "", unit);
    document(title, y + 50.0, &(grid + &body))
}

/// Lines in panels side by side, both axes logarithmic.
pub fn lines(title: &str, [along, up]: [&str; 2], panels: &[(&str, Vec<Line>)]) -> String {
    const TOP: f64 = 84.0;
    const HEIGHT: f64 = 330.0;
    let points = || panels.iter().flat_map(|(_, lines)| lines).flat_map(|line| &line.points);
    let y_axis = Axis::around(points().map(|(_, y)| *y), [TOP + HEIGHT, TOP]);
    let ticks: Vec<f64> = {
        let mut all: Vec<_> = points().map(|(x, _)| *x).collect();
        all.sort_by(f64::total_cmp);
        all.dedup();
        all
    };
    let panel = (WIDTH - 70.0) / panels.len().max(1) as f64;
    let mut body = String::new();
    let mut lowest = TOP + HEIGHT + 50.0;
    for (n, (name, lines_of)) in panels.iter().enumerate() {
        let left = 70.0 + panel * n as f64;
        let right = left + panel - 30.0;
        let place = |x: f64| {
            let n = ticks.iter().position(|tick| *tick == x).unwrap_or(0) as f64;
            left + 14.0 + n / (ticks.len().max(2) - 1) as f64 * (right - left - 28.0)
        };
        text(&mut body, [left.midpoint(right), TOP - 12.0], "middle", "title", name);
        for tick in y_axis.fine_ticks() {
            let y = y_axis.place(tick);
            line(&mut body, "grid", [left, y], [right, y]);
            if n == 0 {
                text(&mut body, [left - 8.0, y + 4.0], "end", "small", &on_axis(tick));
            }
        }
        for tick in &ticks {
            text(
                &mut body,
                [place(*tick), TOP + HEIGHT + 18.0],
                "middle",
                "small",
                &on_axis(*tick),
            );
        }
        text(&mut body, [left.midpoint(right), TOP + HEIGHT + 36.0], "middle", "", along);
        let mut y = TOP + HEIGHT + 62.0;
        for (n, it) in lines_of.iter().enumerate() {
            let (class, dash) = (class(it.role), DASHES[n % DASHES.len()]);
            let points: Vec<_> = (it.points.iter())
                .map(|(x, y)| format!("{:.1},{:.1}", place(*x), y_axis.place(*y)))
                .collect();
            let points = points.join(" ");
            let of_line = format!(r#"class="line {class}" stroke-dasharray="{dash}""#);
            writeln!(body, r#"<polyline {of_line} points="{points}"/>"#).expect("a string");
            writeln!(
                body,
                r#"<polyline {of_line} points="{left:.1},{:.1} {:.1},{:.1}"/>"#,
                y - 4.0,
                left + 34.0,
                y - 4.0
            )
            .expect("a string");
            text(&mut body, [left + 42.0, y], "start", "", &it.label);
            y += 20.0;
        }
        lowest = lowest.max(y);
    }
    let middle = TOP + HEIGHT / 2.0;
    writeln!(
        body,
        r#"<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{}</text>"#,
        escaped(up)
    )
    .expect("a string");
    document(title, lowest, &body)
}

/// Tells lines of one colour apart.
const DASHES: [&str; 8] = ["none", "6 4", "6 4", "none", "none", "2 4", "12 4 2 4", "8 4"];

fn document(title: &str, height: f64, body: &str) -> String {
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0}" role="img" aria-label="{0}"><style>{STYLE}</style>
"#,
        escaped(title)
    );
    text(&mut svg, [16.0, 26.0], "start", "title", title);
    let mut x = 16.0;
    for (role, name) in [
        (Role::Ours, "actix-doclock"),
        (Role::Floor, "floor: the driver alone"),
        (Role::Peer, "peers"),
    ] {
        writeln!(
            svg,
            r#"<rect class="{}" x="{x}" y="38" width="12" height="12" rx="2"/>"#,
            class(role)
        )
        .expect("a string");
        text(&mut svg, [x + 18.0, 49.0], "start", "small", name);
        x += 44.0 + 7.0 * name.len() as f64;
    }
    svg + body + "</svg>\n"
}

fn class(role: Role) -> &'static str {
    match role {
        Role::Floor => "floor",
        Role::Ours => "ours",
        Role::Peer => "peer",
    }
}

fn text(into: &mut String, [x, y]: [f64; 2], anchor: &str, class: &str, text: &str) {
    let text = escaped(text);
    writeln!(
        into,
        r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
    )
    .expect("a string");
}

fn line(into: &mut String, class: &str, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) {
    writeln!(
        into,
        r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
    )
    .expect("a string");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// With as many digits as can be trusted.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v >= 999.5 => {
            let digits = format!("{value:.0}");
            let head = (digits.len() - 1) % 3 + 1;
            let mut grouped = digits[..head].to_owned();
            for group in digits.as_bytes()[head..].chunks(3) {
                grouped.push(' ');
                grouped.push_str(std::str::from_utf8(group).expect("digits"));
            }
            grouped
        }
        v if v >= 99.5 => format!("{value:.0}"),
        v if v >= 9.95 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// The label of a tick, which has few digits.
fn on_axis(value: f64) -> String {
    if value >= 1.0 && value.fract() == 0.0 && value < 1e3 {
        format!("{value:.0}")
    } else if value < 1.0 {
        let text = format!("{value:.6}");
        text.trim_end_matches('0').to_owned()
    } else {
        number(value)
    }
}
